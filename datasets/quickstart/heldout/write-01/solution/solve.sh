#!/bin/bash
cd /app
echo ropo > gaze.txt
