#!/bin/bash
cd /app
touch sake.log
