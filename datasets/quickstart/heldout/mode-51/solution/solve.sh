#!/bin/bash
cd /app
chmod 604 petuba/geri.dat
