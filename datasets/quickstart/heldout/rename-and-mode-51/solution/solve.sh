#!/bin/bash
cd /app
mv sari.csv kuni.csv && chmod 460 gemeso.csv
