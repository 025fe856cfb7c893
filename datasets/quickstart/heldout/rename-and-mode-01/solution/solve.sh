#!/bin/bash
cd /app
mv kale.csv vusa_kubavo.dat && chmod 604 binoka/kofosa.txt
