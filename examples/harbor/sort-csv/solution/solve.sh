#!/bin/bash
head -n 1 /app/data/ships.csv > /app/sorted.csv
tail -n +2 /app/data/ships.csv | sort -t , -k 2 -n -r >> /app/sorted.csv
