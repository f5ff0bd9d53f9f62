#!/bin/bash
echo "Hello, harbour" > /app/greeting.txt
