#!/bin/bash
cd /app
echo 5694 >> gize.log
