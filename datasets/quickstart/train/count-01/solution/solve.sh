#!/bin/bash
cd /app
wc -l < dano.dat > togu.txt
