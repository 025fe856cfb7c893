#!/bin/bash
cd /app
touch nogupu/tadi.log
