#!/bin/bash
cd /app
echo pamo > midu_beri.log && mv fari.csv zabuta.txt
