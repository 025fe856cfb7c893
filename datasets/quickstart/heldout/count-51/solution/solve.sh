#!/bin/bash
cd /app
wc -l < pugira.log > latu_pepu.dat
