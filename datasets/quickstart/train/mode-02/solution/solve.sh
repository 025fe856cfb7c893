#!/bin/bash
cd /app
chmod 444 duvo/sano.txt
