#!/bin/bash
cd /app
echo gepa >> sika.dat && cp simufu_rovopa.txt tuda.md
