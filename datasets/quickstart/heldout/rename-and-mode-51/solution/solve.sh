#!/bin/bash
cd /app
mv sari.csv kuni.csv && chmod 604 gemeso.csv
