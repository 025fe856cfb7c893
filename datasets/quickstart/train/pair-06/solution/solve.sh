#!/bin/bash
cd /app
chmod 444 sama.log && cp leku.csv luve.csv
