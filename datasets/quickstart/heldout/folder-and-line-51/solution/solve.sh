#!/bin/bash
cd /app
mkdir none/zove && echo 3064 >> gukuta.log
