#!/bin/bash
cd /app
tail -n 4 nolu_kukise.txt >> beme.log
