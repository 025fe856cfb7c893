#!/bin/bash
cd /app
rm voza.md && cp dori.md debi.md
