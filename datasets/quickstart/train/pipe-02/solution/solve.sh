#!/bin/bash
cd /app
head -n 18 limi.dat | sort > mititu.log
