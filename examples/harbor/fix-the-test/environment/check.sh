#!/bin/bash
here=$(dirname "$0")
for pair in 4:IV 14:XIV 19:XIX 1994:MCMXCIV; do
  got=$(bash "$here/roman.sh" "${pair%%:*}")
  if [ "$got" != "${pair##*:}" ]; then
    echo "${pair%%:*} is ${pair##*:}, not $got"
    exit 1
  fi
done
echo "all right"
