#!/bin/bash
cd /app
mkdir visali/gezi && echo 2847 >> pose.md
