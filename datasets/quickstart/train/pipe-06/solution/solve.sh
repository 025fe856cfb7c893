#!/bin/bash
cd /app
head -n 6 vegi.md | grep ralide > mati.md
