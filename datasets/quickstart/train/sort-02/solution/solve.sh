#!/bin/bash
cd /app
sort mudo_nase.txt > toleba_muba.csv
