#!/bin/bash
echo minogi
