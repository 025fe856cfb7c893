#!/bin/bash
cd /app
chmod +x falado.sh
