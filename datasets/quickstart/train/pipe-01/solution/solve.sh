#!/bin/bash
cd /app
tail -n 13 moka.dat | wc -l > lota.csv
