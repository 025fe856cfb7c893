#!/bin/bash
cd /app
echo govi > niro_tova.txt && cp zari_zime.log gogo.csv
