#!/bin/bash
cd /app
chmod +x bebe.sh
