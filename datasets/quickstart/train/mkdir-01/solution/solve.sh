#!/bin/bash
cd /app
mkdir malifu/vene
