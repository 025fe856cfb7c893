#!/bin/bash
cd /app
rm keti_zemo.csv && cp moma.csv dega.log
