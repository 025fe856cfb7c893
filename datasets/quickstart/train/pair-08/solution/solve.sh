#!/bin/bash
cd /app
cp numeta.csv vaze.txt && touch merata.csv
