#!/bin/bash
cd /app
chmod 510 paba/medo_ninu.dat
