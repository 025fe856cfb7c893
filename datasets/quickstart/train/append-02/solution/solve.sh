#!/bin/bash
cd /app
echo 2975 >> gugu.log
