#!/bin/bash
cd /app
tail -n 3 radi.txt > vupi_zoti.log
