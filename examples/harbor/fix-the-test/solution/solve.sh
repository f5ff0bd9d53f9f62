#!/bin/bash
bash /solution/by_hand.sh
bash /app/check.sh
