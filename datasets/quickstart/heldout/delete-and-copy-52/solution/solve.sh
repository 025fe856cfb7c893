#!/bin/bash
cd /app
rm rina/gaze.csv && cp mefu.csv verena.txt
