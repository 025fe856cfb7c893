#!/bin/bash
cd /app
tail -n 3 kabi_nofosu.dat > sara.log
