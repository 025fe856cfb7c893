#!/bin/bash
cd /app
head -n 6 fema_navi.dat > fuko.txt
