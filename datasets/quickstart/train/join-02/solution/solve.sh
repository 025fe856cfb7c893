#!/bin/bash
cd /app
cat vuso.dat moto_ruzo.csv > lego.txt
