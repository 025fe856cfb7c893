#!/bin/bash
cd /app
echo nonake > zova/bopo.md
