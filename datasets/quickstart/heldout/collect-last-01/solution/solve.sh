#!/bin/bash
cd /app
tail -n 7 mumara.dat >> ginana.txt
