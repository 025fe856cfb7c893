#!/bin/bash
cd /app
chmod 776 sama.log && cp toko.md ralota.dat
