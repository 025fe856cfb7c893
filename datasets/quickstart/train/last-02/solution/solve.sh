#!/bin/bash
cd /app
tail -n 5 desu.log > vuve.dat
