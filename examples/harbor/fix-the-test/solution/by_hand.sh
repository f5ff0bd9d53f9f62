sed -i 's/ 10 5 4 1)/ 10 9 5 4 1)/; s/ X V IV I)/ X IX V IV I)/' /app/roman.sh
