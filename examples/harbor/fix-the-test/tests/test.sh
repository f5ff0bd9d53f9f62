#!/bin/bash
# The policy sees four numbers in check.sh; these are others.
right=0
for pair in 9:IX 49:XLIX 99:XCIX 444:CDXLIV 3999:MMMCMXCIX; do
  if [ "$(bash /app/roman.sh "${pair%%:*}")" = "${pair##*:}" ]; then
    right=$((right + 1))
  fi
done
[ "$right" = 5 ] && reward=1 || reward=0
echo "{\"reward\": $reward, \"num_right\": $right}" > /logs/verifier/reward.json
