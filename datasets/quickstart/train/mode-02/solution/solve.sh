#!/bin/bash
cd /app
chmod 730 duvo/sano.txt
