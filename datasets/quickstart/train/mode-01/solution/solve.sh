#!/bin/bash
cd /app
chmod 755 paba/medo_ninu.dat
