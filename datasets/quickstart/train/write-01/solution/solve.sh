#!/bin/bash
cd /app
echo dade tibo > rotizo.md
