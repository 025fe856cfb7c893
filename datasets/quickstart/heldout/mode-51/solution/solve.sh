#!/bin/bash
cd /app
chmod 464 petuba/geri.dat
