#!/bin/bash
cd /app
sort betubo.txt | tail -n 2 > zurovu.log
