#!/bin/bash
# Usage: roman.sh NUMBER
values=(1000 900 500 400 100 90 50 40 10 5 4 1)
numerals=(M CM D CD C XC L XL X V IV I)

number=$1
text=""
for i in "${!values[@]}"; do
  while (( number >= values[i] )); do
    text+=${numerals[i]}
    (( number -= values[i] ))
  done
done
echo "$text"
