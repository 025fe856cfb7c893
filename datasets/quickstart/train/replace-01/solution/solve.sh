#!/bin/bash
cd /app
sed -i s/rodagu/suni/ vuvote_gegiru.csv
