#!/bin/bash
cd /app
mkdir kugi && echo rome >> bota.txt
