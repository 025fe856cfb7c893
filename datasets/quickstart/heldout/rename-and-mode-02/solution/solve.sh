#!/bin/bash
cd /app
mv bapo/makizo.txt zideki.md && chmod 750 kafelo.csv
