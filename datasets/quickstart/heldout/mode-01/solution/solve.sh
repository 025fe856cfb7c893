#!/bin/bash
cd /app
chmod 640 zide/vukare.txt
