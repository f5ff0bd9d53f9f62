#!/bin/bash
if cmp -s /app/sorted.csv /tests/expected.csv; then
  echo 1 > /logs/verifier/reward.txt
elif [ "$(head -n 1 /app/sorted.csv)" = "name,tonnage" ] && [ "$(sort /app/sorted.csv)" = "$(sort /tests/expected.csv)" ]; then
  echo 0.5 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
